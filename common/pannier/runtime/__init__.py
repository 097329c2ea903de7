"""What every process of the stack shares: errors, configuration, life cycle, logs, the model's source, the machine."""
