"""Young or rare abilities, each a file or a folder that the core never imports. They may change, or go.

`registry.load_contrib` imports them all, and each adds its entries to the tables of the package: an algorithm, a format
of drafts, a module of transformers, a pass.
"""
