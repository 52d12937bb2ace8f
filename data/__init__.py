"""Conversations → token ids and loss masks. This package stands on the ground and knows neither heads nor engines."""
