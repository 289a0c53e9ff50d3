"""The lectures' six categories of memory, in the order in which charts stack them."""

CATEGORIES = ("parameters", "gradients", "optimizer state", "activations", "input data", "other")
PARAMETERS, GRADIENTS, OPTIMIZER_STATE, ACTIVATIONS, INPUT_DATA, OTHER = range(6)
