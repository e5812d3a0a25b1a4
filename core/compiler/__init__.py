"""From a graph to code: the stages in order, their options, and the tuner."""
