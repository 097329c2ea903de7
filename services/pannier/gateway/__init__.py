"""The process that owns requests: admission, text, scheduling, streaming."""
