"""OpenAI's Responses and Conversations on sessions and turns: a response is a turn, a conversation is a session."""
