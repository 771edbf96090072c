"""`ddpexp predict`: what trained weights predict for each sample of a data set."""
