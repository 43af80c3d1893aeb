"""The HTTP room: validate, authenticate, shape errors and streams. Nothing here touches a tensor."""
