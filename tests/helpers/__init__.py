"""What several tests share: hand-written references, made runs, and documents carried out as a reader would."""
