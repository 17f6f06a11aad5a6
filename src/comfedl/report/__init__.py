"""Looking at runs: one page that compares them, pictures for papers, and the same page while a run goes on."""
