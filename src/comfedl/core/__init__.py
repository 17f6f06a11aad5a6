"""The mathematics of the methods, and the contract between server and clients."""
