"""The attention worker: owns KV blocks and runs the attention operator. Knows no weights, text or sequences."""
