"""How a new host gets the key of the rack: by a token that is good for one host and one hour, or, where it has the key
already, by the key."""
