"""The names of the classes: of CIFAR-10, and of the drawn pictures that stand in for it."""

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
KINDS = ("disc", "ring", "box", "frame", "triangle", "cross", "bars", "half", "moon", "checkers")
