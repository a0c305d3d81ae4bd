"""A volume's end of its connections to lenders."""
