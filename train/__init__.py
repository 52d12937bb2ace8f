"""The training loop over heads, data and infer; ``train_heads.py`` is what is launched."""
