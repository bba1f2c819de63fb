"""The transport that every gRPC service and its clients share; knows nothing of Penstock."""
