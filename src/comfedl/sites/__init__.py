"""Runs over real sites: the apps that Flower runs, a trial on this machine, and what a site needs to start."""
