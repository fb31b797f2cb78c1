"""The screens of `demo` and `chat` on the command line: answers as they come, coloured by who gave each token."""
