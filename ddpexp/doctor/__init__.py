"""`ddpexp doctor`: what a run would meet on these machines, each finding judged good, doubtful or bad."""
