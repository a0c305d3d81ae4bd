"""What lies in /etc of a host: `agent.toml`, shown with where each value came from and read again while the agent runs;
units, user and folders, installed from where pip puts them."""
