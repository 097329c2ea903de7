"""The HTTP front: OpenAI's API, spoken by a client of the gateway that keeps no state of its own."""
