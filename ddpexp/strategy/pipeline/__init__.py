"""Pipeline parallelism: ranks compute the layers of a model one after the other."""
