"""The replicated queue: jobs as every host knows them, and the commands that change them."""
