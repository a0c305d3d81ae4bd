"""Turns to compute (COMP) of a script that only has hooks, on a host that jobs share on purpose: `hooked` takes and
gives them, `gates` are the places where a script asks for one."""
