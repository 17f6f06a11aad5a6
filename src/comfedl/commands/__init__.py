"""Groups of commands; ``comfedl.cli`` puts them together. Heavy imports wait until a command needs them."""
