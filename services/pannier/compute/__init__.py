"""The compute worker: holds the weights, runs the slices, samples. Keeps no request state that can't be rebuilt."""
