// Requests to this server, with the key if there is one. The key stays in this tab.
const keyInput = document.getElementById("key");
keyInput.value = sessionStorage.getItem("key") ?? "";
keyInput.addEventListener("change", () => sessionStorage.setItem("key", keyInput.value));

export class ApiError extends Error {}

export async function ask(path, options = {}) {
  const headers = { "Content-Type": "application/json" };
  if (keyInput.value) headers.Authorization = `Bearer ${keyInput.value}`;
  const answer = await fetch(path, { ...options, headers });
  document.getElementById("key-label").hidden = answer.status !== 401 && !keyInput.value;
  if (!answer.ok) throw new ApiError(await messageOf(answer));
  return answer;
}

async function messageOf(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the server answers ${answer.status}`;
  }
}
