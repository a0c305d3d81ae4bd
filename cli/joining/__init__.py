"""Begin a rack on one host, and let further hosts join it.

`agentctl rack init` on the first host prints the line to type on each further one; `agentctl rack token` on any member
prints another such line. A token is good for one host and one hour."""
