"""The two commands: devproxy-run and devproxy."""
