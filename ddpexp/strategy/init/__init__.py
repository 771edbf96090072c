"""Building a model of which no rank can hold all: without memory first, then with the values that a rank keeps."""
