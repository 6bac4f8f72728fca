"""What a user runs: the command line, the demo, and (one file each) the experiments."""
