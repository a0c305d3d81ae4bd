"""The hooks of each framework, called once a script has imported it."""
