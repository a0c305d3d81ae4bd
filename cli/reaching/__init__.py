"""How a person reaches the page of an agent, and an agent other hosts: `ping`, `page`."""
