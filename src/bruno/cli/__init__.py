"""The command line: a command parses its options, calls one library function and renders the result."""
