"""The tuners: of live elastic jobs (`tuner`), and as the paper has it, on modelled hosts (`disjoint`)."""
