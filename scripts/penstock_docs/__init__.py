"""Parts of the documentation that are generated: `make docs` writes them, tests compare them.

A page is written by hand, except for what is between these lines:

    <!-- generated: keys of collections.NAME -->
    …
    <!-- end -->
"""
