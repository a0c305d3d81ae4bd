"""The plugin on one host: `main` takes facts in; `turns` keeps the pages on which jobs that share this host take
turns; `groups` measures the jobs, and asks for other groups where it is this host's part."""
