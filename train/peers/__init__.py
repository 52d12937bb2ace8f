"""Other projects' trainers measured beside ours, each in its own environment, and their heads brought home."""
