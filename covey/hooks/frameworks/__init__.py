"""The hooks of each framework, installed once a script has imported it."""
