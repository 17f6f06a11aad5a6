"""The mathematics, and the contract between the server and its clients."""
