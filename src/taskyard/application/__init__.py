"""What people and programs can ask of a yard: one typed interface of commands, queries and documents.

`interface` has the calls, the `…_documents` modules and `documents` what they take and return, `errors` how an error
becomes a document, `opening` how a program gets an `Application`. Import from those modules: this one has only the
version, so that a program loads only what it uses.
"""

from taskyard.version import VERSION as VERSION
