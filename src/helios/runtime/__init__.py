"""The engine room: from a tokenized request to its tokens. Nothing here knows HTTP."""
