"""The plugin on one host: `main` takes facts in; `turns` keeps the pages on which jobs that share this host take
turns."""
