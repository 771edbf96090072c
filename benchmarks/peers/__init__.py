"""The programs that ddpexp is raced against: complete, hand-written, and as good as we can make them."""
