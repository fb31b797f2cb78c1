"""The options, inputs and outputs that the commands of ``python -m spec_compile`` share."""
