"""`ddpexp export` and `Run.export`: a trained model for other programs."""
