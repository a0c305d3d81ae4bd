"""What people type. `agentctl` looks at a rack and acts on it through any agent; `covey-rack` makes a rack of several
agents on one machine, shows it at work, and ends it.

agentctl's imports are a budget: it must answer as fast as a person can read. So: argparse, `http.client` over the unix
socket, our own tables; no event loop, no msgspec, no third-party package. One file per noun, imported when it is asked
for.
"""
