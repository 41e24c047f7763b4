"""ENGINE ROOM: the queue worker, its engine and what turns text into token ids and back."""
