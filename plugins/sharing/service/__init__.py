"""The plugin on one host: `main` performs what `machine.host` asks for, `watch` looks at devices and processes."""
