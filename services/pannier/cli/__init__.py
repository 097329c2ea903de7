"""The command line: `pannier serve` and its children, and the commands that talk to a running stack."""
