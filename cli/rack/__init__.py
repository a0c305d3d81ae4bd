"""`covey-rack`: a rack of several agents on this machine."""
