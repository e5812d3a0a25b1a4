"""The framework of operator definitions: what an operator declares, and the rules that several share."""
