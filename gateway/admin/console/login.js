const $ = id => document.getElementById(id);

async function logIn(said) {
  $("why").textContent = "";
  try {
    const answer = await fetch("api/v1/login", {method: "POST", body: JSON.stringify(said), cache: "no-store",
                                             headers: {"Content-Type": "application/json"}});
    if (answer.ok) { location.replace("./"); return; }
    $("why").textContent = (await answer.json()).detail;
  } catch (error) {
    $("why").textContent = "the gateway does not respond";
  }
}

$("form").addEventListener("submit", event => {
  event.preventDefault();
  logIn($("token").value ? {token: $("token").value} : {user: $("user").value, password: $("password").value});
});

// A link that logs in once has its code behind the #, which is sent to nobody.
const code = location.hash.replace(/^#code=/, "");
if (code !== location.hash) {
  history.replaceState(null, "", location.pathname);
  logIn({code});
}
