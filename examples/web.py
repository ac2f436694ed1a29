"""Tasks behind a web application, which only submits them, and a worker. Needs fastapi and uvicorn.

python examples/web.py, and in another shell, from the same folder: taskyard worker examples.web:yard
Then: curl -X POST 'http://127.0.0.1:8000/digests?text=hello'
"""

from hashlib import scrypt
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException

from taskyard import InvalidInput, ResultGone, Yard

yard = Yard("sqlite:///web.db")
app = FastAPI(lifespan=yard.lifespan)  # opened and closed with the application; workers run the tasks


@yard.consumer(concurrency=2)
def digest(text: str) -> str:
    return scrypt(text.encode(), salt=b"example", n=2**14, r=8, p=1, dklen=16).hex()


@app.post("/digests", status_code=202)
async def submit(text: str) -> dict[str, str]:
    handle = await digest.options(dedupe="merge").submit(text)  # the same text twice is one task
    return {"uuid": handle.uuid}


@app.get("/digests/{uuid}")
async def show(uuid: str, wait_s: float = 1.0) -> dict[str, Any]:
    handle = yard.handle(uuid)
    try:
        return {"result": await handle.result(timeout_s=min(wait_s, 30.0))}
    except TimeoutError:
        return {"state": await handle.state()}
    except ResultGone as gone:
        raise HTTPException(404, str(gone)) from None
    except InvalidInput as refused:
        raise HTTPException(400, str(refused)) from None


if __name__ == "__main__":
    uvicorn.run(app)
