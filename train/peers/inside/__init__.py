"""What is executed by a peer's Python: it imports the peer, torch and safetensors, and nothing of ours but this."""
